"""The implementation of `verl.protocol.DataProto`, by subject.

containers  the three containers; operations on columns and metadata; `DataProtoConfig`; tensors as plain containers
rows        operations on rows
"""
