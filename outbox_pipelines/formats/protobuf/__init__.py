"""Payloads in Protobuf's binary form: by descriptors that a compiler has written, without generated code."""
