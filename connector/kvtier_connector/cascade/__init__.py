# SPDX-License-Identifier: Apache-2.0
"""Decides for each request what is loaded, from where, and what is stored, and keeps account of what is on its way."""
