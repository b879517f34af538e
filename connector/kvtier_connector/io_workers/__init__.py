# SPDX-License-Identifier: Apache-2.0
"""Worker processes that read and write blocks on the volume, and their supervisor in the engine's process.

Python's interpreter lock is the reason for processes: a thread of the engine waits for the lock at every system call.
This package imports the standard library and the store; a worker process never imports vLLM.
"""
