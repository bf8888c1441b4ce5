# SPDX-License-Identifier: Apache-2.0
"""Errors that are the user's to mend. The command line shows them as one line, without a traceback."""


class UserError(Exception):
    """Something the user gave is wrong; the message says what was expected, what came and what to do."""


class ExpectationError(UserError):
    """The run went through and did not show what its config expects."""
