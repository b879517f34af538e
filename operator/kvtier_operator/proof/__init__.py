# SPDX-License-Identifier: Apache-2.0
"""Ask running engines whether the tier does what it is for: blocks are shared, and loading them pays."""
