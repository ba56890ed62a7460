# SPDX-License-Identifier: Apache-2.0
"""Zebra parallelism under any host: attention on some ranks, experts on others, in stripes.

``stripe_model`` makes a model's forward a whole striped step, ``stage_model`` that of a pipeline's
stage half of one. ``batches`` brings every rank's
samples to the attention ranks and losses back; ``stripe_pass`` takes a piece of a stripe through
the user's model, whose graph is cut by ``graph_cut``; ``role_exchange`` has the tasks of a step on
both sides. ``profile`` measures by ``rehearsal`` how many experts move to attention ranks. It
imports ``hosts.steps``, ``hosts.attachment`` and what lies below; never a host.
"""
