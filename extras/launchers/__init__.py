"""Launchers other than torchrun: srun, mpirun, and engines that start several nodes (Kubeflow, SkyPilot, dstack)."""
