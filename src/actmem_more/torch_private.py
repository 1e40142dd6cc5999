"""The kernels of attention that torch doesn't document: ``scaled_dot_product_attention`` hides what they return."""

import torch

flash_attention = torch.ops.aten._scaled_dot_product_flash_attention
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
flash_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_on_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
cudnn_attention = torch.ops.aten._scaled_dot_product_cudnn_attention
efficient_attention = torch.ops.aten._scaled_dot_product_efficient_attention
