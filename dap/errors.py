"""The one exception for what a user can mend: bad input, arguments that contradict each other, a file in the way."""


class UserError(ValueError):
    """A refusal in one line: the argument, file or line it is about, both values, and what to do instead."""
