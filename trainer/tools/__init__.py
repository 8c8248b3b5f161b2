"""Commands that look at checkpoints, compare, convert and tidy them: fairtrain-checkpoint, one module for each of its
subcommands, fairtrain-verify-resume and fairtrain-eval.

Values are read and written a few MiB at a time, so that no command needs the memory that a file would fill.
"""
