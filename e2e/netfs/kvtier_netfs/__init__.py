# SPDX-License-Identifier: Apache-2.0
"""Real network file systems on this machine, each mounted twice as two nodes would: for tests and measurements.

Needs root, ``/dev/fuse`` and the packages of the file system. Servers listen on loopback only.
"""
