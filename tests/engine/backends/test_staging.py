"""The memory that saves copy a model's state to."""

import torch

from engine.backends.megatron.staging import Staging


def test_nothing_is_given_out_twice_before_a_restart_and_everything_again_after_it():
    staging = Staging()
    sizes = [(6, torch.float32), (6, torch.float32), (6, torch.bfloat16), (4, torch.float32)]
    first = [staging.empty(*size) for size in sizes]
    assert [(len(tensor), tensor.dtype) for tensor in first] == sizes
    assert len({tensor.data_ptr() for tensor in first}) == len(sizes)
    staging.restart()
    again = [staging.empty(*size) for size in sizes]
    assert [tensor.data_ptr() for tensor in again] == [tensor.data_ptr() for tensor in first]
    assert staging.empty(6).data_ptr() not in {tensor.data_ptr() for tensor in first}


def test_a_copy_has_the_values_of_its_moment_and_a_storage_of_its_own():
    live = torch.arange(12.0).view(3, 4)
    copy, of_a_view = (staging := Staging()).copy(live), staging.copy(live.t()[1:])
    live += 1
    assert copy.tolist() == (live - 1).tolist() and of_a_view.tolist() == (live.t()[1:] - 1).tolist()
    assert copy.untyped_storage().nbytes() == 48 and of_a_view.untyped_storage().nbytes() == 36
