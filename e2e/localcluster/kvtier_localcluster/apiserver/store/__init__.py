# SPDX-License-Identifier: Apache-2.0
"""Objects in memory: their metadata, kinds, schemas and selectors, and the history that watches follow."""
