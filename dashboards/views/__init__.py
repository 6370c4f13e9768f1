"""The views of the dashboard, one file each, in the order of their tabs."""
