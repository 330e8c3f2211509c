"""What every room may use: processes, errors, log, files, seeds, units; and the version of halfstep."""

VERSION = "0.1.0"  # the coming one while CHANGELOG.md opens with "Unreleased"
