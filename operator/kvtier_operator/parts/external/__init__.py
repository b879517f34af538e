# SPDX-License-Identifier: Apache-2.0
"""Engines of another owner: what a tier puts into their pods, where it goes, and conditions about such pods."""
