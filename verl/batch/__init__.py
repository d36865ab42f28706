"""The implementation of `verl.protocol.DataProto`, by subject.

containers     the three containers; operations on columns and metadata; `DataProtoConfig`
rows           operations on rows
serialization  tensors as plain containers
"""
