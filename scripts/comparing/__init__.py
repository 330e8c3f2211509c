"""The parts of halfstep compare: groups over seeds, their statistics, and tables."""
