# SPDX-License-Identifier: Apache-2.0
"""What a request does to stored objects: create, update, patch, apply, scale, evict and delete."""
