"""report.html: a run on one page that needs nothing beside itself, no network and no script."""
