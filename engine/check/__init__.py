"""The checks of -check. The cheap ones also run at the start of every training run."""
