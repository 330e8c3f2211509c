"""Launchers other than torchrun: srun and mpirun."""
