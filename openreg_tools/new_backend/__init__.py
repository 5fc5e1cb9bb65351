"""``openreg-tools new-backend``: a package for a new device, which builds, runs on a stand-in, and is yours to change."""
