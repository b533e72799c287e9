"""The linear layers: linear_float32 and linear_batchnorm_softmax."""
