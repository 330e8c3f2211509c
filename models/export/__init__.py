"""Models for other programs: a writer for each format, whose file is loaded again and compared before it gets its name."""
