# SPDX-License-Identifier: Apache-2.0
"""Two runs of a user's own job, without and with the package, held against each other.

``of_hosts`` watches each host, ``recording`` keeps what it saw. It imports the hosts.
"""
