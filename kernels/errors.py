"""The one error that kernels raise on purpose.

`kernels/` imports nothing of hicache, so it has a type of its own instead of `hicache.errors.BadRequest`, of the same
shape: the argument's name, and what is wrong with it against what was expected. It is a `ValueError`, as that one is.
"""


class BadArgument(ValueError):
    """An argument does not fit. Raised by the wrappers before anything is launched or written."""

    def __init__(self, argument: str, problem: str) -> None:
        super().__init__(f"{argument}: {problem}")
        self.argument = argument
        """Name of the parameter."""
        self.problem = problem
        """What was given, and what was expected."""
