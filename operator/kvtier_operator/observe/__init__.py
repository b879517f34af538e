# SPDX-License-Identifier: Apache-2.0
"""Asks running pods over HTTP what they report, and whether blocks are shared and loading them pays."""
