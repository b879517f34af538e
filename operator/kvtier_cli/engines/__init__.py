# SPDX-License-Identifier: Apache-2.0
"""Verbs about engines of any owner: attach them, and look into one."""
