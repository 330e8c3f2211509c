"""The settings: what can be set, where a value comes from, and how one YAML file and the flags become a frozen Config."""
