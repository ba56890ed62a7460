# SPDX-License-Identifier: Apache-2.0
"""Files that others may have written: read with a limit, checked, and written whole or not at all.

``documents`` reads JSON with comments, ``whole_files`` writes and sums, ``unpickle`` reads what
torch saved without running any of it. It imports nothing of ours.
"""
