"""What can be set, where a setting comes from, and how one YAML file and the flags become a frozen Config."""
