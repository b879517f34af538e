# SPDX-License-Identifier: Apache-2.0
"""``kvtier bench``: the same prompts for several tiers or endpoints, and what each of them took for them."""
