# SPDX-License-Identifier: Apache-2.0
"""Plain records and sums, and what moves data between ranks.

``placement`` says which EP rank holds which expert, ``share`` which replica serves which
rows (by price: ``row_levels``, in C, with a twin in Python), ``transfer`` who sends an expert to
whom.
``comm`` has every collective of the package, ``all_to_all`` other ways for rows, ``layout`` the
process groups. ``rows`` and ``kernels`` move rows in memory; ``hardware`` describes a cluster. It
imports ``schedule`` and ``files``.
"""
