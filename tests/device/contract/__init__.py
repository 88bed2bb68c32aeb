"""What isotrain takes for granted of torch_npu, held against the wheels as they are published."""
