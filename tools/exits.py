"""Exit statuses of the command line, and the two exceptions that end a command with one line on standard error.

0  ok
1  failed: the work was begun and did not succeed, or what was checked is wrong
2  bad usage: an option, file or directory is wrong; found before anything was touched or created
129, 130, 143  stopped by SIGHUP, SIGINT, SIGTERM, after cleaning up
"""

from enum import IntEnum


class Exit(IntEnum):
    """What a command returns."""

    OK = 0
    FAILED = 1
    USAGE = 2
    HUNG_UP = 129
    INTERRUPTED = 130
    TERMINATED = 143


class UsageProblem(Exception):
    """What the user asked for cannot be: exit status 2. Raised before anything was touched; the message is one line."""


class CommandFailed(Exception):
    """The command was begun and did not succeed: exit status 1. The message is one line."""
