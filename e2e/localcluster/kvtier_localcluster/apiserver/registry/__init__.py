# SPDX-License-Identifier: Apache-2.0
"""Create, update, patch, apply, scale and delete stored objects."""
