"""What the tools share: one module for one job."""
