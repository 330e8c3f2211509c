"""What a run leaves and shows: figures, plots, tables of its images, report.html, trackers, and the reader of its folder."""
