"""What a run reports: log lines, figures, curves, traces, advice."""
