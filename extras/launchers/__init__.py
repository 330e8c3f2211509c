"""Starts by srun, by mpirun, and by engines on several nodes (Kubeflow, SkyPilot, dstack)."""
