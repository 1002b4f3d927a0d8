"""Jobs on Spark. Each is a function of a ``JobRun`` and its own options that gives a ``JobReport``.

Each is safe to run again, whenever the one before ended and however.
"""
