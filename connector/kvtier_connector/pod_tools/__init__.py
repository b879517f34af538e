# SPDX-License-Identifier: Apache-2.0
"""Commands and checks that run beside an engine: in init containers, in probes, and in Jobs that test a volume."""
