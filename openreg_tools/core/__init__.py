"""What the commands share: options, devices, samples, moving and comparing calls, child processes, reports."""
