# SPDX-License-Identifier: Apache-2.0
"""The node: runs the containers of pods as local processes, as a kubelet would."""
