"""Generated protobuf and gRPC code; `make proto` writes it from shared/proto."""
