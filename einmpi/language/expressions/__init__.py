"""Expressions in the text of a program to expression trees and vertices."""
