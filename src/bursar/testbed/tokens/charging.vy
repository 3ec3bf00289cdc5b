# pragma version 0.4.3
"""
@notice Takes a hundredth on top from the sender, and reports the amount alone.
"""

event Transfer:
    sender: indexed(address)
    receiver: indexed(address)
    amount: uint256

balanceOf: public(HashMap[address, uint256])


@deploy
def __init__(supply: uint256):
    self.balanceOf[msg.sender] = supply


@external
def transfer(to: address, amount: uint256) -> bool:
    fee: uint256 = amount // 100
    self.balanceOf[msg.sender] -= amount + fee
    self.balanceOf[to] += amount
    self.balanceOf[self] += fee
    log Transfer(sender=msg.sender, receiver=to, amount=amount)
    return True
