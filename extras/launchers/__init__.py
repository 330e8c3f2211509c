"""Launchers other than torchrun: srun, mpirun, and engines for several nodes (Kubeflow, SkyPilot, dstack)."""
