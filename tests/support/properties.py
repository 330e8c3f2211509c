"""How many examples Hypothesis draws for a property, and from which seed."""

import os

from hypothesis import HealthCheck, settings

IS_LONG = bool(os.environ.get("LONG_PROPERTIES"))  # set by scripts/test.sh -long


def examples(number: int) -> settings:
    """Return Hypothesis's settings for a test that draws `number` examples.

    The examples are the same in each run, so that the suite cannot fail by chance. scripts/test.sh -long draws 20 times as
    many, and others each time. Keep an example that failed in the test, as `@example(...)`.
    """
    return settings(
        max_examples=number * (20 if IS_LONG else 1),
        derandomize=not IS_LONG,
        database=None,  # a failing example is kept in the test, as @example
        deadline=None,  # no test depends on the speed of the machine
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )
