# SPDX-License-Identifier: Apache-2.0
"""The command ``kvtier``, which is ``kubectl kvtier`` as well: what people type.

Each verb is a function in a module of its section, imported only when it is called: what a verb does not need is not
waited for. Nothing here is imported by the operator or the connector.
"""
