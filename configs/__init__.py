"""The settings: their schema, their sources, and the loading of a YAML file and flags into a frozen Config."""
