# SPDX-License-Identifier: Apache-2.0
"""Objects in memory: what all of them share, their kinds and schemas, selectors, and versions that watches follow."""
