"""Student's t: how wide a 95% interval by few values must be."""

# The 97.5% quantiles of Student's t for 1 to 30 degrees of freedom. 95% of values lie between -quantile and quantile.
STUDENT = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


def student(degrees: float) -> float:
    """Return the 97.5% quantile of Student's t for these degrees of freedom."""
    return STUDENT[max(int(degrees), 1) - 1] if degrees < len(STUDENT) + 1 else 1.96 + 2.4 / int(degrees)
