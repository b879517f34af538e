# SPDX-License-Identifier: Apache-2.0
"""Defaults and refusals: rules of built-in kinds, and the schemas and CEL rules of CustomResourceDefinitions."""
